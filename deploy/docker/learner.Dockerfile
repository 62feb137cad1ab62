# The learner on NVIDIA GPUs: PyTorch's wheels from PyPI bring their own CUDA libraries; nothing is compiled.
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
RUN python -m venv /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/learner.txt requirements/torch-cuda.txt requirements/deepspeed.txt /src/requirements/
ARG TORCH="--no-deps --require-hashes -r /src/requirements/torch-cuda.txt"
RUN pip install ${TORCH}
RUN pip install --no-deps --require-hashes -r /src/requirements/learner.txt
# Without a GPU here DeepSpeed would refuse cuda; which accelerator it uses is decided when it runs.
RUN DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-deps --require-hashes \
    --no-build-isolation -r /src/requirements/deepspeed.txt
COPY pyproject.toml README.md LICENSE /src/
COPY protocol /src/protocol
COPY gspo /src/gspo
COPY services /src/services
COPY setup.py /src/
RUN pip install --no-deps --no-build-isolation /src && pip uninstall --yes pip

FROM ${BASE}
RUN groupadd --gid 10001 gspo && useradd --uid 10001 --gid 10001 --create-home gspo
COPY --from=build /opt/gspo /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/home/gspo USER=gspo
ENV DS_ACCELERATOR=cuda HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 7003 9102 29500
ENTRYPOINT ["gspo"]
CMD ["learner", "/etc/gspo/config/run.toml"]

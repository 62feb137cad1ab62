# Rollouts and learner without a GPU: what `make setup` installs. An index of yours that has PyTorch's CPU build, too:
# --build-arg TORCH="--no-deps --require-hashes -r /src/requirements/torch-cpu.txt"
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
RUN python -m venv /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/cpu.txt requirements/torch-cpu.txt requirements/deepspeed.txt /src/requirements/
ARG TORCH="--no-deps --require-hashes -r /src/requirements/torch-cpu.txt --index-url https://download.pytorch.org/whl/cpu"
RUN pip install ${TORCH}
RUN pip install --no-deps --require-hashes -r /src/requirements/cpu.txt
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
# One thread each: spinning OpenMP threads that share cores cost up to 50 times.
ENV DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
USER 10001:10001
EXPOSE 7003 9102 9110
ENTRYPOINT ["gspo"]
CMD ["--help"]

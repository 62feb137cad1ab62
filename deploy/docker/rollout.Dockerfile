# A rollout on an NVIDIA GPU: SGLang's published image and the agent loop.
ARG BASE=docker.io/lmsysorg/sglang:v0.5.23

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/rollout-gpu.txt /src/requirements/
# A directory of its own: the image's packages stay as SGLang tested them.
RUN python3 -m pip install --no-deps --require-hashes --target /opt/gspo -r /src/requirements/rollout-gpu.txt
COPY pyproject.toml README.md LICENSE /src/
COPY protocol /src/protocol
COPY gspo /src/gspo
COPY services /src/services
COPY setup.py /src/
RUN python3 -m pip install --no-deps --target /opt/gspo /src

FROM ${BASE}
RUN groupadd --gid 10001 gspo && useradd --uid 10001 --gid 10001 --create-home gspo
COPY --from=build /opt/gspo /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PYTHONPATH=/opt/gspo PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/home/gspo USER=gspo
ENV HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Fails here, and not in a pod, when the image lacks something.
RUN python3 -c "import gspo_services.rollout.__main__, gspo.tasks.grading, sglang" && gspo --help
USER 10001:10001
WORKDIR /home/gspo
EXPOSE 9110
ENTRYPOINT ["gspo"]
CMD ["rollout", "/etc/gspo/config/run.toml"]

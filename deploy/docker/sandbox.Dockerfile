# Servers of sandboxes: Python and C++. Another compiler is a package more in the last stage, or a folder in sandbox.read_only.
# Build in the repository's root: docker build -f deploy/docker/sandbox.Dockerfile -t gspo-sandbox:0.1.0 .
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
RUN python -m venv /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/sandbox.txt /src/requirements/
RUN pip install --no-deps --require-hashes -r /src/requirements/sandbox.txt
COPY pyproject.toml README.md LICENSE /src/
COPY protocol /src/protocol
COPY gspo /src/gspo
COPY services /src/services
COPY setup.py /src/
RUN pip install --no-deps --no-build-isolation /src && pip uninstall --yes pip

FROM ${BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap g++ && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 gspo && useradd --uid 10001 --gid 10001 --create-home gspo
COPY --from=build /opt/gspo /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 7010 9104
ENTRYPOINT ["gspo"]
CMD ["sandbox"]

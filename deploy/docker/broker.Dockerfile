# The broker: no torch. Build in the repository's root: docker build -f deploy/docker/broker.Dockerfile -t gspo-broker:0.1.0 .
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
RUN python -m venv /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/broker.txt /src/requirements/
RUN pip install --no-deps --require-hashes -r /src/requirements/broker.txt
# Of pyarrow's 168 MiB the broker needs what reads and writes Parquet and Arrow files on its volume: 103 MiB.
RUN cd /opt/gspo/lib/python3.11/site-packages/pyarrow && rm -r tests include includes src libarrow_flight.so* _flight.* \
    libarrow_s3.so* _s3fs.* libarrow_python.so libarrow_python.so.*.*
COPY pyproject.toml README.md LICENSE /src/
COPY protocol /src/protocol
COPY gspo /src/gspo
COPY services /src/services
COPY setup.py /src/
RUN pip install --no-deps --no-build-isolation /src && pip uninstall --yes pip

FROM ${BASE}
RUN groupadd --gid 10001 gspo && useradd --uid 10001 --gid 10001 --create-home gspo
COPY --from=build /opt/gspo /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 7001 7002 9101
ENTRYPOINT ["gspo"]
CMD ["broker", "/etc/gspo/config/run.toml"]

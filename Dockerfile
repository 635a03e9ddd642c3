# One image for server, workers and scripts. BASE needs Python 3.11 or later with venv, and nothing else. To pin it, name
# it by digest, as `docker image inspect --format '{{index .RepoDigests 0}}' python:3.11-slim` prints it:
#   docker build --build-arg BASE=python@sha256:<digest> .
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG EXTRAS=examples
# If build/wheelhouse has wheels, only these are installed, and no package index is asked.
COPY pyproject.toml build/wheelhous[e] /wheels/
COPY pyproject.toml README.md LICENSE /src/
COPY proto /src/proto
COPY server /src/server
COPY worker /src/worker
COPY client /src/client
RUN set -e; cd /src; \
    if ls /wheels/*.whl >/dev/null 2>&1; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels; fi; \
    python3 -m venv /opt/central-storage; \
    /opt/central-storage/bin/pip install --quiet --no-cache-dir --no-compile --only-binary=:all: ".[${EXTRAS}]"; \
    /opt/central-storage/bin/python -m compileall -q -j 0 -x '/(pip|tests)/' /opt/central-storage/lib >/dev/null || true

FROM ${BASE}
ARG UID=10001
RUN echo "cs:x:${UID}:${UID}::/home/cs:/usr/sbin/nologin" >> /etc/passwd \
    && echo "cs:x:${UID}:" >> /etc/group \
    && install -d -o ${UID} -g ${UID} -m 0700 /home/cs /home/cs/.cache /run/central-storage
COPY --from=build /opt/central-storage /opt/central-storage
COPY examples /examples
ENV PATH=/opt/central-storage/bin:$PATH HOME=/home/cs CS_ADDRESS=/run/central-storage PYTHONUNBUFFERED=1 \
    CUPY_CACHE_DIR=/home/cs/.cache/cupy
WORKDIR /examples
USER cs
# Kernels are compiled now, so that no container compiles at its start. A volume stays writable on a read-only root.
RUN python -c "from cs_server.compute import kernels; print(kernels.load())"
VOLUME /home/cs/.cache
HEALTHCHECK --interval=10s --timeout=30s --start-period=60s --retries=3 CMD ["cs-launch", "--health"]
CMD ["cs-launch", "--help"]

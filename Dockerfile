# docker build -t accel-train .
# docker run --gpus all --ipc host --user "$(id -u)" -v "$PWD:/work" accel-train run gpt_tiny
#
# --ipc host: data loader workers pass batches through shared memory, of which a container has 64 MB.
FROM python:3.11-slim
# torch.compile calls a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt '/src[all]' && rm -rf /src
# For a user id without a home.
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["accel-train"]
CMD ["--help"]

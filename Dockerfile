# For a machine with an NVIDIA GPU and its container toolkit (torch's wheel brings CUDA; the image needs no toolkit of its own):
#
#   docker build -t vla-rl .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/outputs:/home/vla/run/outputs" vla-rl quickstart
#
# outputs/ must be writable for user 1000; without a GPU leave --gpus out, and pictures are drawn by the CPU.
FROM python:3.12-slim

# EGL for off-screen rendering (a GPU's own driver comes from the toolkit, Mesa's is for the CPU); libusb for RealSense cameras.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri libusb-1.0-0 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 vla \
    && install -d -o vla -g vla /home/vla/run /home/vla/run/outputs
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics PIP_NO_CACHE_DIR=1

WORKDIR /opt/vla-rl
COPY . .
# sim is the embedded simulator; others: real, libero, dualarm, ray, diffusion, peft, openvla, lerobot, tensorboard
ARG EXTRAS=sim,wandb,tensorboard
RUN pip install -c constraints.txt uv \
    && uv pip install --system --no-cache -c constraints.txt --override scripts/overrides.txt ".[$EXTRAS]"

USER vla
WORKDIR /home/vla/run
ENTRYPOINT ["vla-rl"]
CMD ["doctor"]

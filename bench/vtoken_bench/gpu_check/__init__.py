"""What ``scripts/gpu_check.sh`` does on a machine with one NVIDIA GPU: checks, then times; or a rehearsal on a CPU."""

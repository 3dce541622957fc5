import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for jax_decode_world, under importlib mode

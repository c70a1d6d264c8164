"""The handwritten digits that the demo trains on; digits.md says where they come from.

The file holds the pixels alone, one byte each, so the standard library and torch can read it.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import torch
from torch import Tensor

NUM_IMAGES = 1797
NUM_PIXELS = 64
WHITE = 16
"""The largest pixel value in the file."""
SHA256 = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
"""Of the unpacked bytes."""
FILE = Path(__file__).with_name("digits.gz")


def load_digits(file: Path = FILE) -> Tensor:
    """The images as rows of 64 float32 numbers from 0 to 1.

    Raises:
        ValueError: the file is not the one that was shipped.
    """
    pixels = gzip.decompress(file.read_bytes())
    digest = hashlib.sha256(pixels).hexdigest()
    if digest != SHA256:
        raise ValueError(
            f"{file.name} must unpack to the {NUM_IMAGES} digits with SHA-256 {SHA256}, got "
            f"{len(pixels)} bytes with {digest}. Install gradscale again."
        )
    # A copy, because torch warns of memory that it must not write to.
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    return images.view(NUM_IMAGES, NUM_PIXELS).float() / WHITE

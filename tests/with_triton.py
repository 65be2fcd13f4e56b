"""For tests of Triton's kernels that run on a GPU, or anywhere by Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import os

import pytest
import torch

from fathomlm.kernels.triton_here import triton

GPU = torch.cuda.is_available()
WITH_TRITON = [
    pytest.mark.skipif(
        triton is None or not (GPU or os.environ.get("TRITON_INTERPRET") == "1"),
        reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
    ),
    *([pytest.mark.gpu] if GPU else []),
]
"""What such a file's `pytestmark` is."""

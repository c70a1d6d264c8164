from __future__ import annotations

import pytest
import torch

from gradscale import SettingError
from gradscale.torch import kernels
from gradscale.torch.unscale import grouped


class Odd(torch.Tensor):
    """A tensor whose numbers may be anywhere."""


def test_kernels_take_plain_contiguous_tensors_of_their_formats() -> None:
    plain = torch.ones(4, 4)
    with kernels.use("triton"):
        assert kernels.fit(grouped([plain, plain.half(), plain.bfloat16()]))
        assert not kernels.fit(grouped([plain, plain.double()]))
        assert not kernels.fit(grouped([plain.t()[:2]]))
        assert not kernels.fit(grouped([plain.as_subclass(Odd)]))
        assert not kernels.fit(grouped([]))
        assert not kernels.fit(grouped([plain, plain.to("meta")]))
    with kernels.use("reference"):
        assert not kernels.fit(grouped([plain]))
    assert not kernels.fit(grouped([plain]))  # on the CPU nobody asks for them


def test_a_path_is_left_where_its_block_ends() -> None:
    cpu = torch.device("cpu")
    with kernels.use("triton"):
        assert kernels.take(cpu)
    assert not kernels.take(cpu)
    with pytest.raises(SettingError, match="auto, triton, reference"), kernels.use("fast"):
        pass

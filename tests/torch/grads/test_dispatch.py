from __future__ import annotations

import pytest
import torch

from gradscale import SettingError
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.grads.collect import grouped


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
        assert kernels.uses_triton(cpu)
    assert not kernels.uses_triton(cpu)
    with pytest.raises(SettingError, match="auto, triton, reference"), kernels.use("fast"):
        pass


def test_a_table_is_kept_while_the_gradients_are_where_they_were() -> None:
    params = [torch.ones(5, requires_grad=True), torch.ones(2, 3, requires_grad=True)]
    grads = [torch.ones(5), torch.ones(2, 3)]
    with kernels.use("triton"):
        first = kernels.locate(params, grads)
        assert first is not None
        ((dtype, table),) = first.groups
        sent = table.addresses
        assert (dtype, sent.tolist()) == (torch.float32, [grad.data_ptr() for grad in grads])
        assert kernels.locate(params, grads) is first
        grads[0] = grads[0].clone()
        moved = kernels.locate(params, grads)
        assert moved is not None
        assert moved.groups[0][1] is table  # sizes and workspaces are those of before
        assert table.addresses.tolist() == [grad.data_ptr() for grad in grads]
        grads[1] = grads[1].t()
        other = kernels.locate(params, grads)
        assert other is not None
        assert other.groups[0][1] is not table
        assert kernels.locate(params, [grads[0], None]) is None
        assert kernels.locate(params, [grads[0], torch.ones(2, 3).to_sparse()]) is None
        assert kernels.locate(params, [grads[0], torch.ones(4, 3)[::2]]) is None

"""Tensors for a GPU on a machine without one."""

import pytest

from irc.frontends.main_memory import in_main_memory


def test_tensors_for_a_gpu_lie_in_main_memory() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with in_main_memory({"torch"}):
        x = torch.ones(2, device="cuda").cuda()
        layer = torch.nn.Linear(1, 1).cuda().to("cuda")
        tensors = (x, layer.weight, torch.empty(3, device=0), torch.zeros(1).pin_memory())
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert x[:1].expand(3).cuda().is_contiguous()
        torch.cuda.set_device(0)
        torch.cuda.set_stream(stream := torch.cuda.Stream())
        with torch.cuda.stream(stream) as current:
            assert current is stream and current.query()
        assert torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event()) == 0
        assert torch.cuda.current_stream().cuda_stream == torch.cuda.current_device() == 0

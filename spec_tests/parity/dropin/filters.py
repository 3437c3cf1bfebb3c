"""Complex filters in the frequency domain, forward methods other than ``forward``, and an averaged copy of a model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

WIDTH, HIDDEN, STEPS = 8, 5, 5


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.response = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.response, n=WIDTH)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.ModuleList(Filter() for _ in range(2))
        self.down, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def encode(self, x, *, scale=None):
        for each in self.filters:
            x = x + torch.tanh(each(x))
        return self.down(x if scale is None else x * scale["of"][0])

    def decode(self, code):
        return self.up(code)

    def forward(self, x):
        return self.decode(self.encode(x))


def sharded(device):
    model = Autoencoder().to(device)
    for each in model.filters:
        fully_shard(each)
    fully_shard(model)
    for entrance in ("encode", "decode"):
        register_fsdp_forward_method(model, entrance)
    return model


def whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def main(device):
    torch.manual_seed(0)
    model = sharded(device)
    torch.manual_seed(0)
    average = sharded(device).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    report = {"losses": [], "gradients": [], "average": []}
    dice = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=dice).to(device).requires_grad_()
        # Every other step calls `encode` and `decode` instead of `forward`.
        half = {"of": (torch.tensor(0.5, device=device),)}
        made = model(x) if step % 2 else model.decode(model.encode(x, scale=half))
        loss = (made - x.detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.2)
            report["average"].append(average(x).sum().item())
            average.reshard()
        report["losses"].append(loss.item())
        report["gradients"].append(x.grad.double().norm().item())
    report["weights"] = {
        name: [value.real.double().sum().item(), value.imag.double().sum().item() if value.is_complex() else 0.0]
        for each in (model, average)
        for name, value in whole(each).items()
    }
    return report

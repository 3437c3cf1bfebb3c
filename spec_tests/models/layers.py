"""Models with a difficult layer: it stores more than parameters, or accesses its parameters in an unusual way."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from spec_tests.models.info import SAMPLES, floats, keep, tokens
from spec_tests.models.modules import MLP

# --- layers with special behavior ---


# Forward writes to buffers: running statistics are neither sharded nor averaged, and every rank keeps its own.
def _batch_norm() -> nn.Module:
    # Without the first Tanh, the second norm would remove a bias of the first. Its gradient would be rounding noise,
    # which Adam makes as large as any other gradient.
    unit = nn.Sequential(nn.Tanh(), nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), unit, nn.Linear(9, 3))


keep("batch_norm", _batch_norm, nn.Sequential)


# Randomness: each rank draws its own mask, and the all-gather must not draw from the same generator.
def _dropout() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(MLP(), nn.Dropout(0.5)) for _ in range(3)))


keep("dropout", _dropout, nn.Sequential)


# Four-dimensional weights and odd channel counts: a shard can end in the middle of a kernel.
def _conv() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 7, 2, bias=False))
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(7 * 3 * 2, 3))


keep("conv", _conv, nn.Sequential, nn.Linear, batch=floats(SAMPLES, 3, 6, 5))


class Transformer(nn.Module):
    """Two encoder layers over tokens. Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).transpose(1, 2), tokens[:, 1:])


# Attention reads the weight of its output layer without calling that layer. The root's output is a scalar.
keep("transformer", Transformer, nn.TransformerEncoderLayer, batch=tokens, loss=lambda output: output)


class Recurrent(nn.Module):
    """Two LSTM layers between linear layers. The samples are the steps of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.lstm, self.leave = nn.Linear(8, 5), nn.LSTM(5, 6, num_layers=2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(self.enter(x))
        return self.leave(out + hidden[-1])


# An LSTM also stores its weights in a list, which only its own `__setattr__` updates.
keep("lstm", Recurrent, nn.LSTM)

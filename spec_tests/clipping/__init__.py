"""``clip_grad_norm_`` and ``torch.nn.utils.clip_grad_norm_``."""

"""Training runs compared with the plain model, DDP and torch's FSDPs."""

"""Parameters and gradients on the CPU."""

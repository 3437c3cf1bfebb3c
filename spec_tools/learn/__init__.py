"""Solutions of the exercises, and typical wrong solutions as changes of them."""

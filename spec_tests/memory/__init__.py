"""Memory that a call or a step keeps."""

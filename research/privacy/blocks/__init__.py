"""What principal prototypes reveal: membership, sequences of uploads, and a decoder on rows."""

"""Files that both programs keep: blobs by digest, folder locks and private keys."""

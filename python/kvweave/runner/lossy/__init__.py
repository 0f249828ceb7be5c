"""What holds policies that lose something to what was certified of them."""

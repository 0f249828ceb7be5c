"""What a caller gets of decoded tokens: text, stops, answers and streams of them."""

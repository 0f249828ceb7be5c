"""A prompt made ready: what is reused is found, a policy is asked, its plans are carried out."""

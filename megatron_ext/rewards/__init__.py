"""What an answer is worth: verifiers that compare a response with the known answer."""

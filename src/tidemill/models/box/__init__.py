"""Models that can be had by name: from a package that carries one, or from the Hugging Face hub."""

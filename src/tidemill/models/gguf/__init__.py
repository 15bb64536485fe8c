"""GGUF files, as llama.cpp and its kin use them, turned into Hugging Face folders that can be trained."""

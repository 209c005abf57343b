"""The native CPU backend: a decoder in C++ behind the Model seam."""

// A library that only has to exist.

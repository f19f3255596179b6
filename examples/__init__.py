"""Things to run and to copy: the demo, a proxy, a launcher of servers. Not part of the package."""

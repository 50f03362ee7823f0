"""The interfaces of other libraries, implemented on weft, for programs that were written for them."""

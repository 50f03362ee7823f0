"""The interfaces of other libraries, implemented on torchweft, for programs that were written for them."""

"""exp, log and sums with one stated arithmetic: the same bits on any vector width, thread count or device."""

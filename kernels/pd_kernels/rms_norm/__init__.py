"""RMSNorm: plain, with the residual added first, and two side by side for MTP."""

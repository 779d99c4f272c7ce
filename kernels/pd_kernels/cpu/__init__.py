"""The compiled CPU ops: what their sources share, and how Python calls them."""

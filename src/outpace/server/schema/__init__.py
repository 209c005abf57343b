"""What requests may say. A field that is not known is refused by name; nothing is ignored."""

"""The harness of the kit: the device under test, raw access to its memory, and shared checks."""

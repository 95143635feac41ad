"""Another machine, emulated: its times of stages, drafts and links, drafts of its accuracy."""

"""What runs in and around the sandbox's processes: the standard library alone, nothing of ours, so that it starts quickly and
has nothing to tell. Started as a program of its own (`zygote`); `millstream.env.sandbox.programs` is the other side."""

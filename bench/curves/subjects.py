"""All subjects, in the order in which they are measured."""

from bench.curves import allocators, collisions, evictions, footprint, prompts, shapes, steps

SUBJECTS = {
    subject.name: subject
    for part in (prompts, evictions, allocators, shapes, collisions, footprint, steps)
    for subject in part.SUBJECTS
}

//! The INT2 codec: clip, round, pack, and count the bits.

//! Every op on every backend: against its definition, under its laws, by its bits.

mod laws;
mod match_reference;
mod moves;
mod packed;
mod paged;
mod pages;
mod reach;
mod rotate_rows;
mod row_bits;

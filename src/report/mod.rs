//! Reports for people: one page a zoo entry, its figures, and model cards.
//!
//! A page is one file that needs nothing else: style, script and SVG stand in it.

pub mod card;
mod draw;
mod figures;
mod heads;
mod page;

pub use draw::escape;
use page::sentence;
pub use page::{FILE, Inputs, Page, write};

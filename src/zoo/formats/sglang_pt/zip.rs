//! The zip archive that `torch.save` writes: records stored as they are, their data aligned to 64 bytes.
//!
//! Source: APPNOTE.TXT of PKWARE, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.16 (its end); the
//! alignment is that of PyTorch's `PyTorchStreamWriter`, which pads the extra field of the local header.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::{Error, Result};

/// PyTorch maps storages into memory, at this alignment.
pub(super) const ALIGNMENT: usize = 64;

const LOCAL: &[u8] = b"PK\x03\x04";
const CENTRAL: &[u8] = b"PK\x01\x02";
const END: &[u8] = b"PK\x05\x06";
const LOCAL_BYTES: usize = 30;
const CENTRAL_BYTES: usize = 46;
const END_BYTES: usize = 22;
/// The end of the directory is sought in the last bytes of the file, before a comment of any length.
const LONGEST_COMMENT: usize = u16::MAX as usize;
/// 1980-01-01, the first day that the format knows: the same file on every run.
const DATE: u16 = 0x21;
const VERSION: u16 = 20;

/// Records by name, each a part of the file: nothing is copied.
pub(super) struct Archive<'a> {
    place: &'a str,
    records: BTreeMap<&'a str, Record<'a>>,
}

#[derive(Clone, Copy)]
struct Record<'a> {
    data: &'a [u8],
    crc: u32,
}

impl<'a> Archive<'a> {
    /// Reads the central directory. Records that are compressed, encrypted, cut short or overlap are refused.
    pub fn open(place: &'a str, bytes: &'a [u8]) -> Result<Self> {
        let bad = |problem: &str| Error::invalid(place, problem.to_owned());
        if !bytes.starts_with(LOCAL) {
            return Err(
                if bytes.starts_with(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20") {
                    bad("written by `torch.save` before PyTorch 1.6, which is no zip archive")
                        .hint("load it with a newer PyTorch and save it again")
                } else {
                    bad("not a file of `torch.save` (no zip archive)")
                },
            );
        }
        let cut = || {
            bad("cut short, or no whole zip archive: the end of its directory is missing")
                .hint("fetch the file again")
        };
        let tail = bytes.len().saturating_sub(END_BYTES + LONGEST_COMMENT);
        let end = (tail..=bytes.len().saturating_sub(END_BYTES))
            .rev()
            .find(|&at| bytes[at..].starts_with(END))
            .ok_or_else(cut)?;
        let end = Fields(&bytes[end..]);
        let (Some(count), Some(size), Some(start)) = (end.u16(10), end.u32(12), end.u32(16)) else {
            return Err(cut());
        };
        if count == u16::MAX || start == u32::MAX {
            return Err(bad(
                "has more records, or more bytes, than a rotation file needs",
            ));
        }
        let directory = (start as usize)
            .checked_add(size as usize)
            .and_then(|end| bytes.get(start as usize..end))
            .ok_or_else(cut)?;

        if usize::from(count) > directory.len() / CENTRAL_BYTES {
            return Err(cut());
        }
        let mut records = BTreeMap::new();
        let mut extents = Vec::with_capacity(count.into());
        let mut at = 0;
        for _ in 0..count {
            let entry = directory.get(at..).ok_or_else(cut)?;
            let fields = Fields(entry);
            let lengths = [fields.u16(28), fields.u16(30), fields.u16(32)];
            let [Some(name), Some(extra), Some(comment)] = lengths.map(|n| n.map(usize::from))
            else {
                return Err(cut());
            };
            if !entry.starts_with(CENTRAL) {
                return Err(bad("its directory holds something else than records"));
            }
            let name = entry
                .get(CENTRAL_BYTES..CENTRAL_BYTES + name)
                .ok_or_else(cut)?;
            let name =
                std::str::from_utf8(name).map_err(|_| bad("a record's name is not UTF-8"))?;
            at += CENTRAL_BYTES + name.len() + extra + comment;
            let (start, data, crc) = record(place, bytes, name, &fields)?;
            extents.push((start, start + data.len()));
            if records.insert(name, Record { data, crc }).is_some() {
                return Err(bad(&format!("holds record `{name}` twice")));
            }
        }
        extents.sort_unstable();
        if extents.windows(2).any(|pair| pair[1].0 < pair[0].1) {
            return Err(bad("two of its records overlap"));
        }
        Ok(Self { place, records })
    }

    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.records.keys().copied()
    }

    /// A record's bytes, `None` where there is none of that name.
    ///
    /// # Errors
    /// Where its checksum differs.
    pub fn get(&self, name: &str) -> Result<Option<&'a [u8]>> {
        let Some(record) = self.records.get(name) else {
            return Ok(None);
        };
        if crc32fast::hash(record.data) == record.crc {
            Ok(Some(record.data))
        } else {
            Err(Error::invalid(
                self.place,
                format!("record `{name}` is damaged: its checksum differs"),
            )
            .hint("fetch the file again"))
        }
    }
}

/// Start, bytes and checksum of the record that an entry of the directory tells of.
fn record<'a>(
    place: &str,
    bytes: &'a [u8],
    name: &str,
    entry: &Fields,
) -> Result<(usize, &'a [u8], u32)> {
    let bad = |problem: &str| Error::invalid(place, format!("record `{name}` {problem}"));
    let cut = || bad("runs past the end of the file").hint("fetch the file again");
    let (Some(flags), Some(method), Some(crc)) = (entry.u16(8), entry.u16(10), entry.u32(16))
    else {
        return Err(cut());
    };
    let (Some(packed), Some(size), Some(start)) = (entry.u32(20), entry.u32(24), entry.u32(42))
    else {
        return Err(cut());
    };
    if flags & 1 != 0 {
        return Err(bad("is encrypted"));
    }
    if method != 0 || packed != size {
        return Err(bad("is compressed, which `torch.save` never does")
            .hint("unpack the archive and pack it with `zip -0`, or save it again with PyTorch"));
    }
    let local = bytes.get(start as usize..).ok_or_else(cut)?;
    let fields = Fields(local);
    let (Some(name_bytes), Some(extra)) = (fields.u16(26), fields.u16(28)) else {
        return Err(cut());
    };
    let (name_bytes, extra) = (usize::from(name_bytes), usize::from(extra));
    let local_name = local.get(LOCAL_BYTES..LOCAL_BYTES + name_bytes);
    if !local.starts_with(LOCAL) || local_name != Some(name.as_bytes()) {
        return Err(bad("is not where the archive's directory says"));
    }
    let header = LOCAL_BYTES + name_bytes + extra;
    let data = local
        .get(header..)
        .and_then(|rest| rest.get(..size as usize))
        .ok_or_else(cut)?;
    Ok((start as usize + header, data, crc))
}

/// Little-endian numbers at fixed places.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u16(&self, at: usize) -> Option<u16> {
        self.0
            .get(at..)?
            .first_chunk()
            .copied()
            .map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Option<u32> {
        self.0
            .get(at..)?
            .first_chunk()
            .copied()
            .map(u32::from_le_bytes)
    }
}

/// Writes an archive as `torch.save` does, its bytes the same on every run.
pub(super) struct Writer<W> {
    out: W,
    at: usize,
    directory: Vec<u8>,
    count: u16,
}

impl<W: Write> Writer<W> {
    pub fn new(out: W) -> Self {
        Self {
            out,
            at: 0,
            directory: Vec::new(),
            count: 0,
        }
    }

    /// # Errors
    /// Also beyond 4 GiB or 65,534 records.
    pub fn record(&mut self, name: &str, data: &[u8]) -> io::Result<()> {
        let narrow = |n: usize| {
            u32::try_from(n)
                .ok()
                .filter(|n| *n < u32::MAX)
                .ok_or_else(|| io::Error::other("rotations of more than 4 GiB fit no `.pt` file"))
        };
        let (start, size, crc) = (narrow(self.at)?, narrow(data.len())?, crc32fast::hash(data));
        // An extra field has a header of four bytes: its id, `FB` in PyTorch's files, and its length.
        let header = LOCAL_BYTES + name.len() + 4;
        let padding = (self.at + header).next_multiple_of(ALIGNMENT) - self.at - header;
        let mut common = Vec::new();
        for field in [VERSION, 0, 0, 0, DATE] {
            common.extend(field.to_le_bytes());
        }
        for field in [crc, size, size] {
            common.extend(field.to_le_bytes());
        }
        common.extend((name.len() as u16).to_le_bytes());

        let mut local = [LOCAL, common.as_slice()].concat();
        local.extend((padding as u16 + 4).to_le_bytes());
        local.extend(name.as_bytes());
        local.extend(b"FB");
        local.extend((padding as u16).to_le_bytes());
        local.resize(local.len() + padding, b'Z');
        self.out.write_all(&local)?;
        self.out.write_all(data)?;
        self.at += local.len() + data.len();

        self.directory
            .extend([CENTRAL, &0u16.to_le_bytes(), common.as_slice()].concat());
        // Lengths of extra field and comment, disk, attributes within and without.
        self.directory.extend([0; 12]);
        self.directory.extend(start.to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.count = self
            .count
            .checked_add(1)
            .filter(|n| *n < u16::MAX)
            .ok_or_else(|| io::Error::other("too many rotations for a `.pt` file"))?;
        Ok(())
    }

    pub fn finish(mut self) -> io::Result<()> {
        let mut end = [END, &[0; 4]].concat();
        end.extend(self.count.to_le_bytes());
        end.extend(self.count.to_le_bytes());
        for field in [self.directory.len(), self.at] {
            let field = u32::try_from(field).map_err(|_| io::Error::other("larger than 4 GiB"))?;
            end.extend(field.to_le_bytes());
        }
        end.extend([0; 2]);
        self.out.write_all(&self.directory)?;
        self.out.write_all(&end)
    }
}

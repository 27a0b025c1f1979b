//! Files of `virsh save` as SOURCE: libvirt's header and description of the domain, then QEMU's stream.
//!
//! ```text
//!   "LibvirtQemudSave"  version  length  was running  compression  …   0x5c: XML, cookie   0x5c + length: QEMU's stream
//! ```
//! Numbers have the byte order of their host. The format is that of libvirt's `src/qemu/qemu_saveimage.h`;
//! version 3 is the format `sparse`, which QEMU writes with mapped-ram after the description, and which is
//! refused. Out of scope: the description, of which QEMU's part is in the stream too, and decompression, for
//! which there are programs.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use towline_channel::Address;
use towline_control::plan::Source;

const MAGIC: &[u8; 16] = b"LibvirtQemudSave";
/// Magic of a file whose writing has not ended.
const PARTIAL: &[u8; 16] = b"LibvirtQemudPart";
const HEADER_BYTES: usize = 92;
/// The version with one stream.
const VERSION: u32 = 2;
/// The version of files that QEMU has written with mapped-ram, at an offset.
const SPARSE_VERSION: u32 = 3;
/// Maximum length of the description: libvirt limits XML of domains to 10 MiB.
const DESCRIPTION_MAX: u32 = 16 << 20;
/// Programs by libvirt's numbers; 0 stands for uncompressed.
const COMPRESSIONS: [&str; 6] = ["", "gzip", "bzip2", "xz", "lzop", "zstd"];

/// Returns the stream of the file, if it is one of libvirt's.
///
/// # Errors
/// The text for the user: the file is libvirt's, and cannot be read as a stream.
pub(crate) fn stream_of(path: &Path) -> Result<Option<Source>, String> {
    let Some(header) = header(path) else { return Ok(None) };
    let offset =
        offset(&header, path).map_err(|why| format!("{}: a file of `virsh save`: {why}", path.display()))?;
    Ok(offset.map(|offset| Source::Stream(Address::File { path: path.to_owned(), offset })))
}

/// Reads as much as a header has. What cannot be read is reported by the reader of images.
fn header(path: &Path) -> Option<Vec<u8>> {
    // A FIFO is not opened.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut header = Vec::new();
    File::open(path).ok()?.take(HEADER_BYTES as u64).read_to_end(&mut header).ok()?;
    Some(header)
}

/// Returns the offset of the stream. `None`: it is another file.
fn offset(header: &[u8], path: &Path) -> Result<Option<u64>, String> {
    if header.starts_with(PARTIAL) {
        return Err("libvirt has not written it to its end; save the domain again".into());
    }
    if !header.starts_with(MAGIC) {
        return Ok(None);
    }
    if header.len() < HEADER_BYTES {
        return Err("it ends in its header; copy it again from where it is whole".into());
    }
    let number = |index: usize| {
        let at = MAGIC.len() + index * 4;
        let bytes: [u8; 4] =
            header[at..at + 4].try_into().expect("four bytes of a header that is long enough");
        u32::from_ne_bytes(bytes)
    };
    let [version, length, _was_running, compression] = [0, 1, 2, 3].map(number);
    if version == SPARSE_VERSION {
        return Err(
            "it is in libvirt's format `sparse` (version 3), whose pages are at offsets of their own, not in a stream; save the domain \
             again with `virsh save --image-format raw`, or restore it with `virsh restore` and copy the guest from its QEMU"
                .into(),
        );
    }
    if version != VERSION {
        return Err(format!(
            "its version is {version}, expected {VERSION} (a host of this byte order, and one stream); restore it with `virsh \
             restore`, and copy the guest from its QEMU"
        ));
    }
    if length > DESCRIPTION_MAX {
        return Err(format!(
            "its description has {length} bytes, the limit is {DESCRIPTION_MAX}; it is damaged"
        ));
    }
    let offset = HEADER_BYTES as u64 + u64::from(length);
    match COMPRESSIONS.get(compression as usize) {
        Some(&"") => Ok(Some(offset)),
        Some(program) => Err(format!(
            "{program} has compressed it; decompress it on the way: towline copy --return-path off exec:'tail -c +{} {} | {program} -dc' DEST",
            offset + 1,
            path.display()
        )),
        None => Err(format!("its compression has the unknown number {compression}")),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// The header that libvirt 9.0 wrote for a domain whose description has 0x10979 bytes.
    pub(crate) const WRITTEN: [u8; 36] = [
        0x4c, 0x69, 0x62, 0x76, 0x69, 0x72, 0x74, 0x51, 0x65, 0x6d, 0x75, 0x64, 0x53, 0x61, 0x76, 0x65, 2, 0,
        0, 0, 0x79, 0x09, 0x01, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x8d, 0x08, 0, 0,
    ];

    fn changed(at: usize, byte: u8) -> Result<Option<u64>, String> {
        let mut header = WRITTEN.to_vec();
        header.resize(HEADER_BYTES, 0);
        header[at] = byte;
        offset(&header, Path::new("a.save"))
    }

    #[test]
    fn the_stream_follows_the_description() {
        assert_eq!(changed(16, 2), Ok(Some(92 + 0x10979)));
        assert_eq!(changed(0, b'l'), Ok(None));
        assert_eq!(offset(b"QEVM", Path::new("a")), Ok(None));
        assert_eq!(offset(b"", Path::new("a")), Ok(None));
    }

    #[test]
    fn what_is_not_one_stream_is_refused_with_the_way_out() {
        let zstd = changed(28, 5).unwrap_err();
        assert!(zstd.contains("exec:'tail -c +68054 a.save | zstd -dc' DEST"), "{zstd}");
        for (result, text) in [
            (changed(28, 9), "its compression has the unknown number 9"),
            (changed(16, 3), "libvirt's format `sparse` (version 3)"),
            (changed(16, 4), "its version is 4, expected 2"),
            (changed(23, 0xff), "it is damaged"),
            (offset(&WRITTEN, Path::new("a")), "it ends in its header"),
            (offset(PARTIAL, Path::new("a")), "not written it to its end"),
        ] {
            let error = result.unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}

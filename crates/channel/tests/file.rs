//! Files: the stream's cursor, offsets, and the former content that stays.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, open, pattern, recv_exact, recv_to_end, send_all, soon};
use std::fs::OpenOptions;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use tempfile::TempDir;
use towline_channel::{Capabilities, Channel, ChannelExt, Error, FileChannel, IoBuf, IoBufMut, Listener};

fn scratch() -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("image");
    (directory, path)
}

fn read_at(channel: &dyn Channel, len: usize, offset: u64) -> towline_channel::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    channel.recv_exact_at(&mut [IoBufMut::from(bytes.as_mut_slice())], offset)?;
    Ok(bytes)
}

#[test]
fn a_file_is_truncated_at_the_offset() {
    let (_directory, path) = scratch();
    std::fs::write(&path, "headold").unwrap();
    let channel = open(&format!("file:{},offset=0x4", path.display()));
    send_all(&*channel, b"new").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"headnew");
    let listener = Listener::bind(&format!("file:{},offset=4", path.display()).parse().unwrap()).unwrap();
    let reader = listener.accept(soon(), &cancel()).unwrap();
    assert_eq!(recv_to_end(&*reader).unwrap(), b"new");
    assert!(matches!(listener.accept(soon(), &cancel()), Err(Error::Unsupported { .. })));
}

#[test]
fn a_new_file_is_its_owner_s_alone_and_a_missing_one_an_error() {
    let (_directory, path) = scratch();
    let address = format!("file:{}", path.display());
    let missing = Listener::bind(&address.parse().unwrap()).unwrap_err();
    assert!(matches!(&missing, Error::Io { op: "open", peer, .. } if *peer == address), "{missing:?}");
    drop(open(&address));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn offsets_do_not_move_the_stream() {
    let (_directory, path) = scratch();
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    let channel = FileChannel::new(file, 0, "file:test").unwrap();
    assert!(!channel.capabilities().contains(Capabilities::BIDIRECTIONAL));
    let data = pattern(5000);
    let bufs: Vec<IoBuf<'_>> = data.chunks(2).map(IoBuf::from).collect();
    channel.send_all_at(&bufs, 1 << 20).unwrap();
    assert_eq!(channel.position(), 0);
    send_all(&channel, b"start").unwrap();
    assert_eq!(channel.position(), 5);
    assert_eq!(read_at(&channel, 5000, 1 << 20).unwrap(), data);
    assert_eq!(read_at(&channel, 5, 0).unwrap(), b"start");
    let end = read_at(&channel, 10, (1 << 20) + 4996).unwrap_err();
    assert!(matches!(end, Error::Closed { wanted: 10, got: 4, .. }), "{end:?}");
    channel.seek(1);
    assert_eq!(recv_exact(&channel, 4).unwrap(), b"tart");
    channel.sync().unwrap();
}

#[test]
fn a_number_starts_where_its_descriptor_stands() {
    let (_directory, path) = scratch();
    std::fs::write(&path, "abcdef").unwrap();
    let mut file = std::fs::File::open(&path).unwrap();
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(2)).unwrap();
    let channel = open(&format!("fd:{}", file.into_raw_fd()));
    assert_eq!(recv_to_end(&*channel).unwrap(), b"cdef");
    assert!(matches!(send_all(&*channel, b"x"), Err(Error::Unsupported { .. })));
}

#[test]
fn a_file_opened_for_appending_has_no_offsets() {
    let (_directory, path) = scratch();
    std::fs::write(&path, "log:").unwrap();
    let file = OpenOptions::new().append(true).open(&path).unwrap();
    let channel = FileChannel::new(file, 0, "file:test").unwrap();
    assert!(!channel.capabilities().contains(Capabilities::POSITIONED));
    assert!(matches!(channel.send_at(&[IoBuf::from(b"x")], 0), Err(Error::Unsupported { .. })));
    send_all(&channel, b"line").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"log:line");
}

#[test]
fn an_offset_no_file_has_is_refused() {
    let (_directory, path) = scratch();
    let channel = FileChannel::create(&path, 0).unwrap();
    let error = channel.send_at(&[IoBuf::from(b"x")], u64::MAX).unwrap_err();
    assert!(matches!(error, Error::Io { op: "send_at", .. }), "{error:?}");
}

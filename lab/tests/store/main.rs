//! Images in object stores: a directory, and a real S3 server (moto, in Python).
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod damage;
mod directory;
mod garbage;
mod guests;
mod kills;
mod s3;
mod secrets;
mod standstill;
mod support;
mod unleased;
mod verbs;

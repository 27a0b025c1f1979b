//! AES-GCM and ChaCha20-Poly1305 over fragments: memory that need not be Rust's is encrypted into a record, and a record is
//! decrypted into such memory, in one pass and without a copy.
//!
//! ```text
//!   guest memory   [ page ][ page ][ pa│ge ]          each fragment is read once by the cipher
//!                      ▼       ▼      ▼
//!   record         [ ciphertext            │ tag ]    the tag is computed from the ciphertext, in our own buffer
//! ```
//!
//! - *Live memory may change while it is encrypted.* The ciphertext is then that of some mixture of its
//!   contents, as with `sendmsg`. The tag authenticates the ciphertext, which lies in a buffer that only this
//!   thread writes, and each position of the key stream is used once, so the record is valid in any case.
//! - *Decrypted bytes are written before the tag is compared*, and are never read here. [`Aead::open`] is
//!   for memory that is not used unless it succeeds
//!   ([`RecvFlags::UNAUTHENTICATED`](crate::RecvFlags::UNAUTHENTICATED)).
//!
//! Out of scope: nonces, which the caller never repeats with [`Aead::seal`]. Limit: fragments of at most
//! `i32::MAX` bytes; a record has 16 KiB.

use super::cursor::IoCursor;
use super::iobuf::{IoBuf, IoBufMut};
use aws_lc_sys::{
    EVP_CIPHER_CTX, EVP_CIPHER_CTX_ctrl, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new, EVP_CTRL_AEAD_GET_TAG,
    EVP_CTRL_AEAD_SET_TAG, EVP_CipherFinal_ex, EVP_CipherInit_ex, EVP_CipherUpdate, EVP_aes_128_gcm,
    EVP_aes_256_gcm, EVP_chacha20_poly1305,
};
use std::ffi::c_int;
use std::ptr::{NonNull, null, null_mut};

/// Size of a tag.
pub(crate) const TAG_BYTES: usize = 16;
/// Size of a nonce.
pub(crate) const NONCE_BYTES: usize = 12;

/// The tag is not that of these bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TagMismatch;

/// The ciphers of TLS 1.3, all with the same sizes of tag and nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AeadCipher {
    Aes128Gcm,
    Aes256Gcm,
    ChaCha20Poly1305,
}

/// One key, which seals and opens records.
#[derive(Debug)]
pub(crate) struct Aead {
    context: NonNull<EVP_CIPHER_CTX>,
}

// SAFETY: the context is this value's alone, and aws-lc ties none of it to a thread.
unsafe impl Send for Aead {}

/// Direction of a record, as `EVP_CipherInit_ex` defines it.
#[derive(Clone, Copy)]
#[repr(i32)]
enum CipherDirection {
    Open = 0,
    Seal = 1,
}

impl Aead {
    /// `None` for a key that has not the cipher's length, or without memory.
    pub(crate) fn new(cipher: AeadCipher, key: &[u8]) -> Option<Self> {
        // SAFETY: these return pointers to static tables.
        let (cipher, key_bytes) = unsafe {
            match cipher {
                AeadCipher::Aes128Gcm => (EVP_aes_128_gcm(), 16),
                AeadCipher::Aes256Gcm => (EVP_aes_256_gcm(), 32),
                AeadCipher::ChaCha20Poly1305 => (EVP_chacha20_poly1305(), 32),
            }
        };
        if key.len() != key_bytes {
            return None;
        }
        // SAFETY: takes nothing; returns a context that `drop` frees, or null.
        let this = Self { context: NonNull::new(unsafe { EVP_CIPHER_CTX_new() })? };
        let seal = CipherDirection::Seal as c_int;
        // SAFETY: a valid context and cipher; `key` has as many bytes as the cipher reads. A null nonce is
        // set later.
        let set = unsafe {
            EVP_CipherInit_ex(this.context.as_ptr(), cipher, null_mut(), key.as_ptr(), null(), seal)
        };
        (set == 1).then_some(this)
    }

    /// Encrypts the next bytes of `data`, then `trailer`, into `sealed`, with the tag at its end.
    ///
    /// # Panics
    /// If `sealed` has no room for `trailer` and the tag, or `data` has fewer bytes than it has room for.
    pub(crate) fn seal(
        &mut self,
        nonce: &[u8; NONCE_BYTES],
        header: &[u8],
        data: &mut IoCursor<'_, '_>,
        trailer: &[u8],
        sealed: &mut [u8],
    ) {
        let (body, tag) = sealed.split_at_mut(sealed.len() - TAG_BYTES);
        let (mut room, end) = body.split_at_mut(body.len() - trailer.len());
        self.begin(CipherDirection::Seal, nonce, header);
        while !room.is_empty() {
            let fragment = data.first().expect("as many bytes as the record has room for").prefix(room.len());
            let (ciphertext, rest) = room.split_at_mut(fragment.len());
            self.update(fragment, &mut IoBufMut::from(ciphertext));
            data.advance(fragment.len());
            room = rest;
        }
        self.update(IoBuf::from(trailer), &mut IoBufMut::from(end));
        assert!(self.finish(), "encryption ends with any tag");
        self.control(EVP_CTRL_AEAD_GET_TAG, tag.try_into().expect("split there"));
    }

    /// Decrypts `sealed`, which ends with its tag: its last bytes into `trailer`, those before into `room`.
    /// On failure the contents of both are undefined.
    ///
    /// # Errors
    /// The tag is another.
    ///
    /// # Panics
    /// If `room` is too small, or `sealed` shorter than `trailer` and a tag.
    pub(crate) fn open(
        &mut self,
        nonce: &[u8; NONCE_BYTES],
        header: &[u8],
        sealed: &[u8],
        room: &mut [IoBufMut<'_>],
        trailer: &mut [u8],
    ) -> Result<(), TagMismatch> {
        let (body, tag) = sealed.split_at(sealed.len() - TAG_BYTES);
        let (mut data, end) = body.split_at(body.len() - trailer.len());
        self.begin(CipherDirection::Open, nonce, header);
        for fragment in room {
            if data.is_empty() {
                break;
            }
            let ciphertext = data.split_off(..fragment.len().min(data.len())).expect("no longer than it is");
            self.update(IoBuf::from(ciphertext), &mut fragment.prefix(ciphertext.len()));
        }
        assert!(data.is_empty(), "the caller gave room for all of it");
        self.update(IoBuf::from(end), &mut IoBufMut::from(trailer));
        let mut tag: [u8; TAG_BYTES] = tag.try_into().expect("split there");
        self.control(EVP_CTRL_AEAD_SET_TAG, &mut tag);
        if self.finish() { Ok(()) } else { Err(TagMismatch) }
    }

    /// Starts a record with its nonce and its additional data.
    fn begin(&mut self, direction: CipherDirection, nonce: &[u8; NONCE_BYTES], header: &[u8]) {
        let (context, direction) = (self.context.as_ptr(), direction as c_int);
        let (length, mut done) = (length(header.len()), 0);
        // SAFETY: a context with a key; `nonce` has as many bytes as these ciphers read, `header` as many as are
        // named. An output of null stands for additional data, of which nothing is written.
        let initialised = unsafe {
            EVP_CipherInit_ex(context, null(), null_mut(), null(), nonce.as_ptr(), direction) == 1
                && EVP_CipherUpdate(context, null_mut(), &raw mut done, header.as_ptr(), length) == 1
        };
        assert!(initialised, "a key, a nonce and a header are all that it needs");
    }

    /// Encrypts or decrypts `from` into the first bytes of `to`, which has room for them and does not overlap
    /// it.
    fn update(&mut self, from: IoBuf<'_>, to: &mut IoBufMut<'_>) {
        assert!(to.len() >= from.len(), "checked by the callers");
        if from.is_empty() {
            return;
        }
        let (input, output) = (from.iov().iov_base.cast::<u8>(), to.iov().iov_base.cast::<u8>());
        let mut done = 0;
        // SAFETY: a context that `begin` prepared. `from.len()` bytes are readable at `input` and as many
        // writable at `output` (their makers' promise, and the comparison above); no Rust reference to live
        // memory is made. One of the two is a private slice of this process, which no other live buffer
        // covers, so they do not overlap. A concurrent change of live memory changes contents only: see the
        // module.
        let updated = unsafe {
            EVP_CipherUpdate(self.context.as_ptr(), output, &raw mut done, input, length(from.len()))
        };
        assert!(updated == 1 && done as usize == from.len(), "a record is shorter than the cipher's limit");
    }

    /// Ends a record; false if it was opened with another tag.
    fn finish(&mut self) -> bool {
        let (mut nothing, mut done) = ([0_u8; TAG_BYTES], 0);
        // SAFETY: a context that `begin` prepared; these ciphers write nothing at their end, and a block fits.
        unsafe { EVP_CipherFinal_ex(self.context.as_ptr(), nothing.as_mut_ptr(), &raw mut done) == 1 }
    }

    /// Reads the tag of what was encrypted, or sets the one to compare with.
    fn control(&mut self, operation: c_int, tag: &mut [u8; TAG_BYTES]) {
        // SAFETY: a valid context; these two operations read or write as many bytes at the pointer as the
        // argument says.
        let done = unsafe {
            EVP_CIPHER_CTX_ctrl(self.context.as_ptr(), operation, length(TAG_BYTES), tag.as_mut_ptr().cast())
        };
        assert!(done == 1, "the length is the cipher's, and the direction was set by `begin`");
    }
}

impl Drop for Aead {
    fn drop(&mut self) {
        // SAFETY: made by `EVP_CIPHER_CTX_new` and freed only here; this also erases the key.
        unsafe { EVP_CIPHER_CTX_free(self.context.as_ptr()) }
    }
}

fn length(bytes: usize) -> c_int {
    c_int::try_from(bytes).expect("a fragment of a record")
}

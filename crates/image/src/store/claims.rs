//! Objects that one of many makes, for programs of several hosts that have to agree on one of them.
//!
//! A store must have writes on the condition that an object does not exist (S3's `If-None-Match`), and enforce them: others are refused, unlike
//! where images are written. A claim may be made again, as its answer can be lost.

use std::time::Duration;

use bytes::Bytes;

use super::access::Store;
use super::objects::WriteMode;
use super::{Error, Result};
use crate::location::Location;

/// Longest content of a claim.
const BYTES_MAX: u64 = 4 << 10;
/// Time for a claim, or for a list of them. What becomes of a request afterwards is not known.
const WITHIN: Duration = Duration::from_secs(10);

/// Makes the object `name` below `place` with this content, unless it exists. Returns the content that it has.
///
/// # Errors
/// [`Error::Unconditional`]: the store does not enforce it. Else it is not known whether the object was made.
pub fn claim(place: &Location, name: &str, content: &[u8]) -> Result<Vec<u8>> {
    let (content, other) = (Bytes::copy_from_slice(content), Bytes::from([content, b" "].concat()));
    let (store, name) = (Store::open_existing(place, None)?, name.to_owned());
    let objects = store.objects.clone();
    store.wait(within(place, async move {
        match objects.put(&name, content.clone(), WriteMode::CreateOnly).await {
            Ok(_) => {}
            Err(Error::Exists { .. }) => {
                let found = objects.get(&name, BYTES_MAX).await?;
                let removed = || Error::Conflict { object: objects.object_name(&name) };
                return found.map(|(bytes, _)| bytes.to_vec()).ok_or_else(removed);
            }
            Err(error) => return Err(error),
        }
        // A server that knows no conditions ignores them.
        match objects.put(&name, other, WriteMode::CreateOnly).await {
            Err(Error::Exists { .. }) => Ok(content.to_vec()),
            Ok(_) => Err(Error::Unconditional { object: objects.object_name(&name) }),
            Err(error) => Err(error),
        }
    }))
}

/// Names of the objects directly below `place`.
///
/// # Errors
/// The store is unreachable, or refuses access.
pub fn claims(place: &Location) -> Result<Vec<String>> {
    let store = Store::open_existing(place, None)?;
    let objects = store.objects.clone();
    store.wait(within(place, async move {
        let failed = Error::store("cannot be listed", objects.location.to_string());
        let listed = objects.list_top().await.map_err(failed)?;
        Ok(listed.iter().map(|object| objects.key(object)).collect())
    }))
}

fn within<T, W: Future<Output = Result<T>>>(
    place: &Location,
    work: W,
) -> impl Future<Output = Result<T>> + use<T, W> {
    let late = Error::Late { store: place.to_string(), waited: WITHIN };
    async move { tokio::time::timeout(WITHIN, work).await.unwrap_or(Err(late)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_makes_an_object() {
        let place = tempfile::tempdir().unwrap();
        let place: Location = format!("store:{}", place.path().display()).parse().unwrap();
        assert!(claims(&place).unwrap().is_empty());
        let claimed = std::thread::scope(|scope| {
            let place = &place;
            let claim = |claimant: u8| claim(place, "generation.1", &[claimant]).unwrap();
            let threads: Vec<_> = (0..6).map(|claimant| scope.spawn(move || claim(claimant))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(claimed.iter().all(|holder| *holder == claimed[0]), "{claimed:?}");
        assert_eq!(claim(&place, "generation.1", &claimed[0]).unwrap(), claimed[0]);
        assert_eq!(claims(&place).unwrap(), ["generation.1"]);
        assert!(claims(&"store:/nowhere".parse().unwrap()).is_err());
    }
}

//! Generations as objects of a store.

use super::claim::{ArbiterError, Claimant};

fn failed<E: std::fmt::Display>(place: &str) -> impl FnOnce(E) -> ArbiterError {
    move |error| ArbiterError::Store { place: place.to_owned(), reason: error.to_string() }
}

pub(super) fn newest(place: &str, guest: &str) -> Result<u64, ArbiterError> {
    let location = place.parse::<towline_image::Location>().map_err(failed(place))?;
    let names = towline_image::store::claims(&location).map_err(failed(place))?;
    Ok(names.iter().filter_map(|name| super::claim::generation(name, guest)).max().unwrap_or_default())
}

pub(super) fn claim(place: &str, name: &str, claimant: &Claimant) -> Result<bool, ArbiterError> {
    let location = place.parse::<towline_image::Location>().map_err(failed(place))?;
    let json = serde_json::to_vec(claimant).map_err(failed(place))?;
    let holder = towline_image::store::claim(&location, name, &json).map_err(failed(place))?;
    let version = super::claim::VERSION;
    let other = || format!("{name} is not one of version {version}; use the same towline on both hosts");
    claimant.is(&holder).ok_or_else(other).map_err(failed(place))
}

//! Generations that a program gives.

use super::answer::ask;
use super::claim::{ArbiterError, Claim, Claimant, Stake};

pub(super) fn newest(command: &str, guest: &str) -> Result<u64, ArbiterError> {
    let action = "newest";
    let found = ask(command, &[("TOWLINE_ACTION", action.into()), ("TOWLINE_GUEST", guest.into())])?;
    found.parse().map_err(|_| ArbiterError::Output { action, found, expected: "a number" })
}

/// The program prints the claimant that has the generation.
pub(super) fn claim(command: &str, claim: &Claim<'_>, claimant: &Claimant) -> Result<bool, ArbiterError> {
    let action = "claim";
    let stake = match claim.stake {
        Stake::Guest => "guest",
        Stake::Copy => "copy",
        Stake::LastOutput => "last-output",
    };
    let found = ask(
        command,
        &[
            ("TOWLINE_ACTION", action.into()),
            ("TOWLINE_GUEST", claim.guest.into()),
            ("TOWLINE_GENERATION", claim.generation.to_string()),
            ("TOWLINE_STAKE", stake.into()),
            ("TOWLINE_CLAIMANT", claimant.id.clone()),
            ("TOWLINE_HOST", claimant.host.clone()),
        ],
    )?;
    let is_id =
        |text: &str| text.len() == claimant.id.len() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id(&found) {
        return Ok(found == claimant.id);
    }
    Err(ArbiterError::Output { action, found, expected: "the claimant that has the generation" })
}

//! Generations that a program gives.

use super::answer::{Answer, NoAnswer, ask};
use super::claim::{ArbiterError, Claim, Claimant, Stake, Verdict};

pub(super) fn newest(command: &str, guest: &str) -> Result<u64, ArbiterError> {
    let action = "newest";
    let found = output(command, &[("TOWLINE_ACTION", action.into()), ("TOWLINE_GUEST", guest.into())])?;
    found.parse().map_err(|_| ArbiterError::Output { action, found, expected: "a number" })
}

/// The program prints the claimant that has the generation.
pub(super) fn claim(command: &str, claim: &Claim<'_>, claimant: &Claimant) -> Result<Verdict, ArbiterError> {
    let action = "claim";
    let stake = match claim.stake {
        Stake::Guest => "guest",
        Stake::Copy => "copy",
        Stake::LastOutput => "last-output",
    };
    let found = output(
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
    match found {
        found if found == claimant.id => Ok(Verdict::Won),
        found if is_id(&found) => Ok(Verdict::Lost),
        found => {
            Err(ArbiterError::Output { action, found, expected: "the claimant that has the generation" })
        }
    }
}

/// Output of a program that has succeeded.
fn output(command: &str, variables: &[(&str, String)]) -> Result<String, NoAnswer> {
    match ask(command, variables)? {
        Answer { is_yes: true, output, .. } => Ok(output),
        Answer { message, .. } => Err(NoAnswer::Status { status: "exit status 1".into(), message }),
    }
}

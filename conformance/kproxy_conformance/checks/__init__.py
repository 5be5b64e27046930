"""Checks for backends of any make: does it keep the contract, and do packets get through?"""

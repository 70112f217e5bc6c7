"""Modules in Google's Model Explorer: model-explorer FILE.irc --extensions=irc.model_explorer"""
